"""The CUDA backend: the compiled core's kernels, on NVIDIA GPUs from sm_80 on.

Kernels run on torch's current stream of the tensor's device. They neither synchronize nor
allocate; what they write comes from torch's allocator on that stream, so that CUDA graphs and
`record_stream` work as with any other operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...formats import PlaneSpec
from ...reference import FOLD_WIDTH, Folded
from ..choice import Backend, DeviceSupport, EncodeRequest, OpQuery, register_backend
from ..cpu import core, core_error, core_spec
from ..inputs import addresses as memory
from ..inputs import stream_of
from .architectures import chip_reason, spec_reason
from .block_product import multiply_blocks, multiply_pair
from .encoder import GpuEncoder, have_one_amax
from .finish import Finisher, finish, two_factors
from .folder import Folder
from .group_encoder import GpuGroupEncoder
from .launch_addresses import Addresses
from .norm_activation import encode_mapped, store_mapped
from .operand_decoder import OperandDecoder
from .plane_forms import as_read, buffers_as_read, form_of, formed_planes
from .plane_layout import plane_layout
from .ragged_tokens import encode_ragged
from .token_rows import spread_rows, sum_rows

__all__ = ["CUDA"]


@dataclass(frozen=True)
class NewPlanes:
    """Planes about to be written: buffers, what the module takes, and what stays alive until then.

    Args:
        buffers: of the rowwise plane, then of the columnwise plane.
        planes: as the module takes them, None for no plane.
        finds: whether the amax of each is found by the kernels.
        stats: amaxes, given or found.
        copied: where the first of them goes as well, or None.
    """

    buffers: list[torch.Tensor]
    planes: list[tuple[Any, ...] | None]
    finds: list[bool]
    stats: list[torch.Tensor]
    copied: torch.Tensor | None

    def finish(self) -> None:
        """Complete the planes, after the launch."""
        if self.copied is not None:
            self.copied.copy_(self.stats[0])


class GpuKernels(Addresses):
    """The operations of a backend over a module of GPU kernels.

    Args:
        module: functions over device pointers, as csrc/bindings/cuda.cpp makes them.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def launch(self, device: torch.device) -> contextlib.AbstractContextManager[int]:
        """Return a context with `device` current; its value is the stream, as a number."""
        return _on_device(device)

    def encode(
        self, x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None, request: EncodeRequest
    ) -> list[torch.Tensor]:
        """Encode one or both planes; statistics that are not given are found on the way."""
        rows, cols = x.shape
        with self.launch(x.device) as stream:
            new = self.new_planes(x.device, rows, cols, row, col, request)
            source = self.matrix("encode: x", x, x.device)
            place = (*source, rows, cols, *x.stride())
            is_done = self.module.encode(*place, *new.planes, *new.finds, stream)
            new.finish()
        if is_done:
            return new.buffers

        def encode(row: PlaneSpec | None, col: PlaneSpec | None) -> list[torch.Tensor]:
            return self.encode(x, row, col, request)

        return formed_planes(self, encode, (row, col), rows, cols)

    def encoder(
        self, row: PlaneSpec | None, col: PlaneSpec | None, dtype: torch.dtype
    ) -> GpuEncoder:
        """Return what encodes planes of two specs: see `Backend`."""
        return GpuEncoder(self, row, col, dtype)

    def group_encoder(
        self, row: PlaneSpec | None, col: PlaneSpec | None, dtype: torch.dtype
    ) -> GpuGroupEncoder:
        """Return what encodes planes of two specs for products of groups: see `Backend`."""
        return GpuGroupEncoder(self, row, col, dtype)

    def folder(self, spec: PlaneSpec, rows: int, cols: int, height: int = 1) -> Folder:
        """Return what folds planes of one spec and size: see `Backend`."""
        return Folder(self, spec, rows, cols, height)

    def operand_decoder(
        self, spec: PlaneSpec, rows: int, cols: int, dtype: torch.dtype
    ) -> OperandDecoder | None:
        """Return what decodes planes of one spec and size as operands: see `Backend`."""
        if form_of(spec) or spec.scale_layout not in ("", "factors"):
            return None  # of contiguous buffers, as the kernel reads them
        return OperandDecoder(self, spec, rows, cols, dtype)

    def finisher(
        self, rows: int, cols: int, dtype: torch.dtype, bounds: tuple[float, float]
    ) -> Finisher:
        """Return what finishes products of one size: see `Backend`."""
        return Finisher(self, rows, cols, dtype, bounds)

    def new_planes(
        self,
        device: torch.device,
        rows: int,
        cols: int,
        row: PlaneSpec | None,
        col: PlaneSpec | None,
        request: EncodeRequest,
    ) -> NewPlanes:
        """Return new planes of a matrix `[rows, cols]`, before the kernels that write them."""
        buffers: list[torch.Tensor] = []
        planes: list[tuple[Any, ...] | None] = []
        finds: list[bool] = []
        stats: list[torch.Tensor] = []
        shared = _share_amax(row, col, request)
        copied = None
        for spec, shape, known, random_stream in (
            (row, (rows, cols), request.row_stat, request.row_stream),
            (col, (cols, rows), request.col_stat, request.col_stream),
        ):
            if spec is None:
                planes.append(None)
                finds.append(False)
                continue
            layout = plane_layout(spec, *shape)
            own = layout.make(device)
            stat = known if layout.needs_amax else None
            finds.append(layout.needs_amax and known is None)
            if finds[-1]:
                count = shape[0] if spec.has_row_factors else 1
                stat = own[2] if len(own) == 3 else own[1].new_empty(count)
                if shared and stats:
                    finds[-1], stat = False, stats[0]
                    copied = own[2] if len(own) == 3 else None
            stat_pointer = 0
            if stat is not None:
                stats.append(stat)
                stat_pointer = self.statistic(spec, shape[0], stat, known is None, device)
            planes.append(
                (
                    layout.text,
                    self.pointer(own[0], True),
                    self.pointer(own[1], True),
                    stat_pointer,
                    self.seed(spec, request.seed, device) if spec.stochastic else 0,
                    request.row0,
                    request.col0,
                    random_stream,
                    *layout.scale_strides,
                    layout.form,
                )
            )
            buffers += own
            if len(own) == 3 and known is not None:
                own[2].copy_(known)
        return NewPlanes(buffers, planes, finds, stats, copied)

    def map(self, *call: Any) -> tuple[torch.Tensor, ...]:
        """Return a norm or an activation of a matrix: `norm_activation`."""
        return store_mapped(self, *call)

    def map_encode(self, *call: Any, **specs: Any) -> tuple[Any, ...]:
        """Encode a norm or an activation that is never in memory: `norm_activation`."""
        return encode_mapped(self, *call, **specs)

    def encode_many(
        self,
        xs: Sequence[torch.Tensor],
        row: PlaneSpec | None,
        col: PlaneSpec | None,
        request: EncodeRequest,
    ) -> list[torch.Tensor]:
        """Encode each of N matrices of one dtype as `encode` does, in as few launches as can be.

        Returns:
            The buffers of the first matrix, as `encode` returns them, then those of the second, ...
        """
        if any(spec is not None and form_of(spec) for spec in (row, col)):
            each = (self.encode(x, row, col, request.of_group(i)) for i, x in enumerate(xs))
            return [buffer for own in each for buffer in own]
        count, device = len(xs), xs[0].device
        shared = _share_amax(row, col, request)
        finds = [
            spec is not None and spec.needs_amax and known is None
            for spec, known in ((row, request.row_stat), (col, request.col_stat))
        ]
        finds[1] = finds[1] and not shared
        buffers: list[list[torch.Tensor]] = [[] for _ in xs]
        planes: list[tuple[Any, ...] | None] = []
        with self.launch(device) as stream:
            # Those of one plane behind the other's; a row-scaled plane has its own place for them.
            found = torch.empty(count * sum(finds), dtype=torch.float32, device=device)
            stats = self.pointer(found, True)
            for spec, is_col, known, random_stream in (
                (row, False, request.row_stat, request.row_stream),
                (col, True, request.col_stat, request.col_stream),
            ):
                if spec is None:
                    planes.append(None)
                    continue
                address = stats
                if known is not None:
                    address = self.given(
                        "encode_many: statistics", known, torch.float32, count, device
                    )
                elif finds == [True, True] and is_col:
                    address += count * found.element_size()
                shapes = [tuple(x.shape[::-1] if is_col else x.shape) for x in xs]
                layouts = {shape: spec.buffers(*shape) for shape in set(shapes)}  # models repeat
                pointers = []
                for shape, own in zip(shapes, buffers, strict=True):
                    made = [
                        torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                        for buffer in layouts[shape]
                    ]
                    own += made
                    data, scale, *rest = (self.pointer(one, True) for one in made)
                    pointers.append((data, scale, rest[0] if rest else 0))
                planes.append(
                    (
                        core_spec(spec)[0],
                        random_stream,
                        0 if spec.row_scaled or not spec.needs_amax else address,
                        finds[is_col],
                        pointers,
                        *(0, 0, 0),  # scales as the planes have them, in their own form
                    )
                )
            dtype = memory.DTYPES[xs[0].dtype]
            matrices = [
                (self.matrix("encode_many: x", x, device, only=dtype)[0], *x.shape, *x.stride())
                for x in xs
            ]
            seeds = self.given("encode_many: seed", request.seed, torch.int64, count, device)
            self.module.encode_many(dtype, matrices, *planes, seeds, stream)
        return [buffer for own in buffers for buffer in own]

    def encode_ragged(self, *call: Any) -> list[torch.Tensor] | None:
        """Encode rows sorted by group, columns padded; None if no kernel can: `ragged_tokens`."""
        return encode_ragged(self, *call)

    def _decode(
        self,
        buffers: list[torch.Tensor],
        spec: PlaneSpec,
        rows: int,
        cols: int,
        dtype: torch.dtype,
        is_operand: bool,
    ) -> torch.Tensor:
        own, spec = buffers_as_read(buffers, spec, rows, cols), as_read(spec)
        width, device = spec.padded(cols) if is_operand else cols, own[0].device
        with self.launch(device) as stream:
            out = torch.empty(rows, width, dtype=dtype, device=device)
            self.module.decode(
                core_spec(spec)[0],
                *self.plane("decode", own, spec, rows, cols, device),
                rows,
                cols,
                self.pointer(out, True),
                memory.DTYPES[dtype],
                is_operand,
                0,
                stream,
            )
        return out

    def decode(
        self,
        buffers: list[torch.Tensor],
        spec: PlaneSpec,
        rows: int,
        cols: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return self._decode(buffers, spec, rows, cols, dtype, False)

    def operand(
        self,
        buffers: list[torch.Tensor],
        spec: PlaneSpec,
        rows: int,
        cols: int,
        dtype: torch.dtype,
        asks_range: bool = False,
    ) -> tuple[torch.Tensor, bool]:
        # Whether a value left BF16's normal range would have to be read back: a GPU's product keeps
        # subnormals, and what lies below them is in its stated bound (docs/reference/numerics.md).
        return self._decode(buffers, spec, rows, cols, dtype, True), False

    def amax(self, x: torch.Tensor, spec: PlaneSpec) -> torch.Tensor:
        with self.launch(x.device) as stream:
            out = torch.empty(spec.stat_shape(x.shape[0]), dtype=torch.float32, device=x.device)
            self.module.amax(
                *self.matrix("amax: x", x, x.device),
                *x.shape,
                *x.stride(),
                -1 if spec.signs is None else spec.signs,
                self.pointer(out, True),
                spec.row_scaled,
                stream,
            )
        return out

    def transpose(self, data: torch.Tensor, rows: int, cols: int, bits: int) -> torch.Tensor:
        source = data.contiguous()
        width = -(-rows // 2) if bits == 4 else rows
        with self.launch(data.device) as stream:
            out = torch.empty(cols, width, dtype=data.dtype, device=data.device)
            memory.codes("transpose: data", source, rows, cols, bits, data.device)
            self.module.transpose(
                self.pointer(source), rows, cols, bits, self.pointer(out, True), stream
            )
        return out

    def round_stochastic(
        self,
        x: torch.Tensor,
        seed: torch.Tensor,
        dtype: torch.dtype,
        stream: int,
        row0: int,
        col0: int,
    ) -> torch.Tensor:
        with self.launch(x.device) as launch_stream:
            out = torch.empty(x.shape, dtype=dtype, device=x.device)
            self.module.round_stochastic(
                self.matrix("round_stochastic: x", x, x.device, "float32")[0],
                *x.shape,
                *x.stride(),
                memory.DTYPES[dtype],
                self.given("round_stochastic: seed", seed, torch.int64, 1, x.device),
                row0,
                col0,
                stream,
                self.pointer(out, True),
                launch_stream,
            )
        return out

    def sum_rows(self, *call: Any) -> torch.Tensor:
        """Return weighted sums over rows of tokens: `token_rows`."""
        return sum_rows(self, *call)

    def spread_rows(self, *call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient of `sum_rows`: `token_rows`."""
        return spread_rows(self, *call)

    def fold(
        self, buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int, height: int = 1
    ) -> Folded:
        """Return the plane folded to FP8 with scales of `height x 128`: `reference.fold_plane`."""
        own = [buffer.contiguous() for buffer in buffers]
        width, device = spec.padded(cols), own[0].device
        down, right = -(-rows // height), -(-width // FOLD_WIDTH)
        with self.launch(device) as stream:
            codes = torch.empty(rows, width, dtype=torch.uint8, device=device)
            # Scales of one group of columns side by side, as cuBLASLt reads them.
            scale = torch.empty(right, down, dtype=torch.float32, device=device)
            changed = torch.empty(1, dtype=torch.int64, device=device)
            self.module.fold(
                core_spec(spec)[0],
                *self.plane("fold", own, spec, rows, cols, device)[:2],
                rows,
                width,
                height,
                self.pointer(codes, True),
                self.pointer(scale, True),
                1,
                down,
                self.pointer(changed, True),
                stream,
            )
        return Folded(codes, scale.t(), changed)

    def swizzle(self, scale: torch.Tensor) -> torch.Tensor:
        """Return one-byte scales `[rows, blocks]` in tiles of 128 x 4, in one dimension."""
        rows, blocks = scale.shape
        size = -(-rows // 128) * -(-blocks // 4) * 512
        with self.launch(scale.device) as stream:
            out = torch.empty(size, dtype=scale.dtype, device=scale.device)
            source = self.given("swizzle: scale", scale, scale.dtype, rows * blocks, scale.device)
            self.module.swizzle(source, rows, blocks, self.pointer(out, True), stream)
        return out

    def finish(self, *call: Any) -> torch.Tensor:
        """Return what follows a product, done: `finish`."""
        return finish(self, *call)

    def two_factors(self, *call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of two planes of two levels: `finish`."""
        return two_factors(self, *call)

    def clear_rest(self, x: torch.Tensor, ends: torch.Tensor) -> None:
        """Write zeros into rows of x from the last end on; rows are contiguous, of 16 bytes."""
        with self.launch(x.device) as stream:
            last = self.pointer(ends) + ends.element_size() * (ends.shape[0] - 1)
            row_nbytes = x.shape[1] * x.element_size()
            self.module.clear_rest(self.pointer(x, True), x.shape[0], row_nbytes, last, stream)

    def multiply_blocks(self, *call: Any) -> torch.Tensor:
        """Return the product of FP8 codes with block scales: `block_product`."""
        return multiply_blocks(self, *call)

    def multiply_pair(self, *call: Any) -> torch.Tensor:
        """Return the product of two matrices of them: `block_product`."""
        return multiply_pair(self, *call)

    def operations(self) -> dict[str, Any]:
        """Return the operations as a backend names them."""
        names = (
            *("encode", "encode_many", "encode_ragged", "map", "map_encode", "decode", "operand"),
            *("amax", "transpose", "round_stochastic", "sum_rows", "spread_rows", "fold"),
            *("swizzle", "finish", "two_factors", "clear_rest", "multiply_blocks"),
            "multiply_pair",
        )
        return {name: getattr(self, name) for name in names}


def _share_amax(row: PlaneSpec | None, col: PlaneSpec | None, request: EncodeRequest) -> bool:
    """Whether both planes need the tensor's own amax, so that the first one's serves both."""
    return request.row_stat is request.col_stat is None and have_one_amax(row, col)


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[int]:
    # Nearly always the device is current: a guard would only ask and set it, twice for each kernel.
    if device.index is None or device.index == torch.cuda.current_device():
        return contextlib.nullcontext(stream_of(device))
    return _guarded(device)


@contextlib.contextmanager
def _guarded(device: torch.device) -> Any:
    with torch.cuda.device(device):
        yield stream_of(device)


_module: Any = getattr(core, "cuda", None)


def _supports(query: OpQuery) -> str | None:
    if core is None:
        return f"the compiled core is missing ({core_error})"
    if _module is None:
        return "this build of hybridq has no CUDA kernels (HYBRIDQ_CUDA=ON builds them)"
    return chip_reason(query.chip, _module.architectures()) or spec_reason(query)


_KERNELS = GpuKernels(_module)
#: The backend of the compiled core's kernels on GPUs.
CUDA = register_backend(
    Backend(
        "cuda",
        _supports,
        _KERNELS.operations(),
        devices=DeviceSupport(("cuda",)),
        priority=60,
        finds_amax=True,
        encoder=_KERNELS.encoder,
        group_encoder=_KERNELS.group_encoder,
        folder=_KERNELS.folder,
        operand_decoder=_KERNELS.operand_decoder,
        finisher=_KERNELS.finisher,
    )
)
