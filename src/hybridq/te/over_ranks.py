"""What scripts read, and Megatron-Core sets, of a linear module's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from .. import nn

__all__ = ["OverRanks"]


#: Where parts are kept of a module that was told to multiply its part alone.
_ALONE: Final = "_parts_alone"


class OverRanks:
    """Attributes of Transformer Engine's modules: of the constructor's arguments, by their names.

    Of a module that has parts of its weights `sequence_parallel`, `tp_group` and `parallel_mode`
    may be written. A process group is kept by its name, since nothing copies one. Weights are
    marked as parts whatever a module is told, as there: Megatron-Core tells experts, whose weights
    it has divided itself, of no ranks, and leaves out of a norm what is not marked on other ranks.
    """

    _written_options: ClassVar[Mapping[str, Any]] = {"use_bias": nn.settled}

    parallel: Mapping[str, Any]
    #: Name of the buffers of user buffers; not used.
    ub_name: str | None = None
    #: Whether there is a bias.
    use_bias: bool = True

    def take_arguments(self: Any, given: Mapping[str, Any]) -> None:
        """Keep what the constructor was told.

        Args:
            given: its arguments, by name.
        """
        own = self.__dict__
        own["_parallel_mode"], own["ub_name"] = given.get("parallel_mode"), given.get("ub_name")
        own["use_bias"], own["_tp_size"] = bool(given["bias"]), given["tp_size"]
        group = given.get("tp_group")
        if group is not None:
            own["_group_name"] = group if isinstance(group, str) else group.group_name
        self.mark_weights(given.get("parallel_mode") == "row")

    def take_from_parent(self: Any) -> None:
        """Do the same for a module that another one has made."""
        names = [name for name in self._parameters if name.endswith("bias")]
        own = [name for name in names if not name.startswith("layer_norm")]
        self.__dict__["use_bias"] = any(self._parameters[name] is not None for name in own)
        self.mark_weights()  # those that are row parallel are marked as such

    @property
    def tp_size(self) -> int:
        """How many ranks have parts of the weights."""
        for part in self.__dict__.get("parallel", {}).values():
            return len(part.sizes)
        return int(self.__dict__.get("_tp_size", 1))

    @tp_size.setter
    def tp_size(self, value: int) -> None:
        if self.__dict__.get("parallel") and value != self.tp_size:
            raise AttributeError(
                f"te.{type(self).__name__}: tp_size is settled when the module is made, as "
                f"{self.tp_size}, got {value!r}; make another module"
            )
        self.__dict__["_tp_size"] = value

    @property
    def parallel_mode(self) -> str | None:
        """`"column"`, `"row"` or None.

        None may be written, and the mode again: a module with a part of the weights then multiplies
        it and nothing more, and what ranks exchange is the caller's.
        """
        for part in self.__dict__.get("parallel", {}).values():
            return str(part.mode)
        return self.__dict__.get("_parallel_mode")

    @parallel_mode.setter
    def parallel_mode(self: Any, value: str | None) -> None:
        own, mode = self.__dict__, self.parallel_mode
        if value == mode:
            return
        parts, alone = own.get("parallel", {}), own.get(_ALONE, {})
        if value is None and not (self.is_dealt or self.sums_gradients):
            size = self.tp_size
            own.update({_ALONE: parts, "parallel": {}, "is_parallel": False, "_tp_size": size})
            own["_parallel_mode"] = None
        elif alone and value == next(iter(alone.values())).mode:
            own.update({_ALONE: {}, "parallel": alone, "is_parallel": True})
        elif not parts and not alone and self.tp_size == 1 and value in ("column", "row"):
            own["_parallel_mode"] = value  # of one rank, and says nothing
        else:
            raise AttributeError(
                f"te.{type(self).__name__}: parallel_mode is settled when the module is made, as "
                f"{mode!r}, and may be None, got {value!r}; make another module"
            )

    @property
    def sequence_parallel(self) -> bool:
        """Whether inputs, or outputs, are this rank's part of the tokens."""
        return any(part.sequence_parallel for part in self.__dict__.get("parallel", {}).values())

    @sequence_parallel.setter
    def sequence_parallel(self, value: bool) -> None:
        parts = self.__dict__.get("parallel", {})
        if parts:
            own = {name: one._replace(sequence_parallel=bool(value)) for name, one in parts.items()}
            self.__dict__["parallel"] = own
        elif value and not self.__dict__.get(_ALONE):
            raise AttributeError(
                f"te.{type(self).__name__}: sequence_parallel takes a module that has a part of "
                "the weights, got a whole one; make it with tp_size or tp_group"
            )

    @property
    def tp_group(self) -> Any:
        """The process group of the ranks that have parts of the weights, or None."""
        names = [one.group for one in self.__dict__.get("parallel", {}).values() if one.group]
        name = names[0] if names else self.__dict__.get("_group_name")
        if not name:
            return None
        from .._torch_ranks import process_group

        return process_group(name)

    @tp_group.setter
    def tp_group(self: Any, value: Any) -> None:
        self.set_tensor_parallel_group(value)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Take the group of the ranks that have the other parts of the module's weights.

        Args:
            tp_group: as `hybridq.Linear.set_tensor_parallel_group` takes it.
        """
        super().set_tensor_parallel_group(tp_group)  # type: ignore[misc]
        if tp_group is not None:
            own = tp_group if isinstance(tp_group, str) else tp_group.group_name
            self.__dict__["_group_name"] = own
