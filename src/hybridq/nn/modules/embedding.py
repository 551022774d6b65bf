"""hybridq.nn.Embedding: nn.Embedding whose table may be a quantized tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import nn

from ...recipes import ModuleType, register_module_type
from ...tensor import is_quantized
from ..weights import plain_weights
from .constructor_arguments import checked
from .quantized_module import QuantizedModule
from .written_options import Check, said

__all__ = ["EMBEDDING", "Embedding"]

#: A table of rows: no GEMM, and one plane that is read row by row.
EMBEDDING: Final = register_module_type(
    ModuleType("embedding", gemms=(), reads=(("weight", "rowwise"),))
)


def _without_product(module: Any, name: str, value: Any) -> Any:
    """Return an option of products' gradients, which must be off where there is no product."""
    if value:
        text = f"{name} must be False, since its gradient is no product, got {value!r}"
        raise AttributeError(said(module, text))
    return value


class Embedding(QuantizedModule, nn.Embedding):
    """`nn.Embedding` whose weight is quantized if it is made in `hybridq.quantized_model_init`.

    The weight is then the rowwise plane that the recipe has for the weight of a module of type
    `"embedding"`; a lookup decodes the rows that are taken, and no others. Its gradient is the one
    of `nn.Embedding`, in the weight's nominal dtype. A weight that is not quantized is looked up as
    it is, under every recipe: rounding rows gains nothing where they are not stored.

    Args:
        num_embeddings, embedding_dim, padding_idx: as for `nn.Embedding`.
        max_norm, norm_type, sparse: likewise. A quantized weight takes no `max_norm`, which writes
            to the rows that it looks up, and no gradient that is `sparse`.
        scale_grad_by_freq, device, dtype: likewise.
        name: qualified name for the role that a recipe's factory sees. Where it is None,
            `hybridq.convert` fills in the name within the model.

    Raises:
        TypeError: `name` is no string, a switch no bool, or a size no int.

    Example:
        >>> import torch, hybridq
        >>> with hybridq.quantized_model_init("mxfp8"):
        ...     table = hybridq.nn.Embedding(1000, 64)
        >>> table.weight.nbytes, table(torch.tensor([[3, 999]])).shape
        (66000, torch.Size([1, 2, 64]))
    """

    module_type: str = EMBEDDING.name
    #: None: no GEMM has them, and FSDP2 gathers values.
    weight_parts: Mapping[str, str] = {}
    _written_options: ClassVar[Mapping[str, Check]] = {
        "delay_wgrad_compute": _without_product,
        "fuse_wgrad_accumulation": _without_product,
    }

    @checked
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            device=device,
            dtype=dtype,
        )
        self._take_name(name)

    def initial_weights(self) -> Iterable[tuple[str, str]]:
        return (("weight", ""),)

    def reset_parameters(self) -> None:
        """Set the weight to the initial values of `nn.Embedding`."""
        with plain_weights(self):
            super().reset_parameters()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of the weight that `input` names.

        Args:
            input: integers, of any shape.

        Returns:
            `[*input.shape, embedding_dim]`, in the weight's dtype.

        Raises:
            RuntimeError: the weight is quantized, and there is a `max_norm`, or its gradient is
                `sparse`.
        """
        if is_quantized(self.weight):
            if self.max_norm is not None:
                raise self._error(
                    RuntimeError,
                    "max_norm writes to the rows that are looked up, which a quantized weight does "
                    f"not take, got max_norm={self.max_norm}",
                )
            if self.sparse and self.weight.requires_grad and torch.is_grad_enabled():
                raise self._error(
                    RuntimeError,
                    "a quantized weight has no sparse gradient; leave sparse off, or freeze it",
                )
        return super().forward(input)
