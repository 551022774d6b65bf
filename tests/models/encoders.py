"""Encoders, encoders with decoders, and models of images, of sounds, and of two things."""

from __future__ import annotations

from .family import (
    SIDE,
    TEXT,
    VISION,
    VOCABULARY,
    Family,
    both,
    classes,
    images,
    pairs,
    speech,
    waves,
)

__all__ = ["ENCODERS"]

_BERT = {**TEXT, "hidden_act": "gelu"}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32, 32),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}

ENCODERS = (
    Family("BERT", "encoder", "BertForMaskedLM", "BertConfig", _BERT, generates=False),
    Family("RoBERTa", "encoder", "RobertaForMaskedLM", "RobertaConfig", _BERT, generates=False),
    Family(
        "DeBERTa-v2",
        "encoder",
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        _BERT,
        classes,
        generates=False,
        attention="eager",
    ),
    Family(
        "ModernBERT",
        "encoder",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**TEXT, "cls_token_id": 1, "sep_token_id": 2},
        generates=False,
    ),
    Family(
        "DistilBERT",
        "encoder",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
        generates=False,
    ),
    Family(
        "T5",
        "encoder and decoder",
        "T5ForConditionalGeneration",
        "T5Config",
        _T5,
        both,
        attention="eager",
    ),
    Family(
        "BART", "encoder and decoder", "BartForConditionalGeneration", "BartConfig", _SEQ2SEQ, both
    ),
    Family(
        "Switch",
        "encoder, decoder and experts",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {**_T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        both,
        attention="eager",
    ),
    Family(
        "ViT", "vision", "ViTForImageClassification", "ViTConfig", VISION, images, generates=False
    ),
    Family(
        "DINOv2",
        "vision",
        "Dinov2ForImageClassification",
        "Dinov2Config",
        VISION,
        images,
        generates=False,
    ),
    Family(
        "Swin",
        "vision",
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": SIDE,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        images,
        generates=False,
        attention="eager",
    ),
    Family(
        "wav2vec 2.0", "audio", "Wav2Vec2Model", "Wav2Vec2Config", _SPEECH, waves, generates=False
    ),
    Family("HuBERT", "audio", "HubertModel", "HubertConfig", _SPEECH, waves, generates=False),
    Family(
        "Whisper",
        "audio",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
        speech,
    ),
    Family(
        "CLIP",
        "multimodal",
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**TEXT, "eos_token_id": 2},
            "vision_config": VISION,
            "projection_dim": 64,
        },
        pairs,
        generates=False,
    ),
    Family(
        "SigLIP",
        "multimodal",
        "SiglipModel",
        "SiglipConfig",
        {"text_config": TEXT, "vision_config": VISION},
        pairs,
        generates=False,
    ),
)
