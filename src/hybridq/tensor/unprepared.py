"""What FSDP2 asks of a quantized parameter that nobody has prepared: an error, not other bits."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Unprepared"]


class Unprepared:
    """The two hooks of FSDP2, for tensors that it would quantize shard by shard."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> NoReturn:
        """Raise: each shard would take the amaxes of its own rows, and travel decoded.

        Args:
            mesh, outer_size, outer_stride, module, mp_policy: as FSDP2 gives them.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"fully_shard: a quantized parameter {list(outer_size)} must be prepared, or ranks "
            "would quantize their shards apart; call hybridq.distributed.prepare_fsdp2(model) "
            "before fully_shard"
        )

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> NoReturn:
        """Never called; FSDP2 wants both.

        Args:
            all_gather_outputs, metadata, param_dtype, out: as FSDP2 gives them.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("fully_shard: nothing was gathered")
