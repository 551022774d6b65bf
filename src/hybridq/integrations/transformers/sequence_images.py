"""Images, videos and audio in sequences that ranks share: a rank has the features of its tokens.

Every rank is given all of them, and runs their encoders whole; of what these make it takes the rows
of the placeholder tokens that its part has. transformers takes encoded images and videos in the
place of pixels; of audio the encoder's output is cut.
"""

from __future__ import annotations

import inspect
from typing import Any, Final, NamedTuple

import torch

from ...distributed.sequence import HeadExchange

__all__ = ["TOKEN_TYPES", "WHOLE", "OwnFeatures", "takes_images"]

_WHERE: Final = "sequence_parallel"
#: Kinds of models whose masks and placeholders are known.
_FAMILIES: Final = ("gemma3", "gemma4")
#: What is cut like tokens, and of the whole where masks are made.
TOKEN_TYPES: Final = ("token_type_ids", "mm_token_type_ids")


class _Encoded(NamedTuple):
    """A kind of input that the model encodes.

    Attributes:
        method: of the model, which encodes it.
        token: name in the configuration of the placeholder's number.
        inputs: of the method; the first one must be there.
    """

    method: str
    token: str
    inputs: tuple[str, ...]


_KINDS: Final = {
    "image": _Encoded(
        "get_image_features", "image_token_id", ("pixel_values", "image_position_ids")
    ),
    "video": _Encoded(
        "get_video_features",
        "video_token_id",
        ("pixel_values_videos", "video_position_ids", "num_frames_per_video"),
    ),
}
_AUDIO: Final = ("input_features", "input_features_mask")
#: Inputs that every rank has whole.
WHOLE: Final = (*[name for kind in _KINDS.values() for name in kind.inputs], *_AUDIO)


def takes_images(model: Any) -> bool:
    """Return whether ranks may share sequences with images of a model.

    Args:
        model: a PreTrainedModel.
    """
    takes_features = "mm_encoder_outputs" in inspect.signature(model.forward).parameters
    return model.config.model_type in _FAMILIES and takes_features


class OwnFeatures:
    """The rows of encoded images, videos and audio that are of this rank's tokens.

    Args:
        model: for which `takes_images` is true.
        exchange: among which ranks.
    """

    def __init__(self, model: Any, exchange: HeadExchange) -> None:
        self._exchange = exchange
        #: Of audio: the numbers of this rank's tokens, and of how many.
        self._audio: tuple[torch.Tensor, int] | None = None
        towers = [one.audio_tower for one in model.modules() if hasattr(one, "audio_tower")]
        if towers and towers[0] is not None:
            towers[0].register_forward_hook(self._cut_audio)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnFeatures:
        return self  # as the implementation of attention that it belongs to

    def replace(self, model: Any, given: dict[str, Any]) -> None:
        """Put encoded rows of this rank's tokens in the place of images and videos.

        Args:
            model: that is called.
            given: arguments of its forward, which change.

        Raises:
            ValueError: placeholders and features are not equally many, or there is no `input_ids`.
        """
        self._audio = None
        if not any(given.get(name) is not None for name in WHOLE):
            return
        if "input_ids" not in given:
            raise ValueError(f"{_WHERE}: images need input_ids, whose tokens say where they stand")
        own = given["input_ids"]
        whole = self._exchange.gathered(own)
        made = {}
        for name, kind in _KINDS.items():
            inputs = {one: given.pop(one) for one in kind.inputs if one in given}
            if kind.inputs[0] not in inputs:
                continue
            encoder = next(one for one in model.modules() if hasattr(one, kind.method))
            output = getattr(encoder, kind.method)(**inputs, return_dict=True)
            numbers, count = self._numbers(own, whole, getattr(model.config, kind.token))
            output.pooler_output = _rows(name, output.pooler_output, numbers, count)
            made[name] = output
        if made:
            given["mm_encoder_outputs"] = made
        if given.get(_AUDIO[0]) is not None:
            self._audio = self._numbers(own, whole, model.config.audio_token_id)

    def _numbers(
        self, own: torch.Tensor, whole: torch.Tensor, token: int
    ) -> tuple[torch.Tensor, int]:
        """Return which of all placeholders, row by row, are this rank's, and how many there are."""
        is_one = whole == token
        numbers = (is_one.flatten().cumsum(0) - 1).view_as(whole)
        first = self._exchange.rank * own.shape[1]
        mine = numbers.narrow(1, first, own.shape[1])[own == token]
        return mine, int(is_one.sum())

    def _cut_audio(self, module: Any, args: Any, output: Any) -> None:
        """Leave the rows of this rank's tokens in what an audio encoder has made."""
        if self._audio is None:
            return
        rows = output.last_hidden_state[output.attention_mask]
        kept = _rows("audio", rows[None], *self._audio)
        output.last_hidden_state = kept
        output.attention_mask = torch.ones(kept.shape[:2], dtype=torch.bool, device=kept.device)


def _rows(what: str, features: Any, numbers: torch.Tensor, count: int) -> Any:
    """Return rows of features, in the form that they have: a tensor, or one for each image."""
    is_list = not isinstance(features, torch.Tensor)
    flat = torch.cat(list(features)) if is_list else features.flatten(0, -2)
    if flat.shape[0] != count:
        raise ValueError(
            f"{_WHERE}: features of {what} must be as many as tokens of the whole sequences, got "
            f"{flat.shape[0]} and {count}; give every rank all of them"
        )
    kept = flat[numbers]
    return (kept,) if is_list else kept[None]
