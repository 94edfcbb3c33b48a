"""Families of models, by their `model_type` in transformers: each is a short file that maps a config to layers."""

from dataclasses import replace

from triforce.checkpoint.model_families.family import Family
from triforce.checkpoint.model_families.gemma import GEMMA2, GEMMA3
from triforce.checkpoint.model_families.glm4 import GLM4
from triforce.checkpoint.model_families.glm4_moe import GLM4_MOE
from triforce.checkpoint.model_families.gpt_oss import GPT_OSS
from triforce.checkpoint.model_families.granite import GRANITE
from triforce.checkpoint.model_families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from triforce.checkpoint.model_families.mixture import MIXTRAL, QWEN3_MOE
from triforce.checkpoint.model_families.olmo2 import OLMO2, OLMO3
from triforce.checkpoint.model_families.phi3 import PHI3
from triforce.checkpoint.model_families.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "smollm3": SMOLLM3,
    "granite": GRANITE,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3": replace(GEMMA3, text="text_config"),
    "glm4": GLM4,
    "glm4_moe": GLM4_MOE,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
}
