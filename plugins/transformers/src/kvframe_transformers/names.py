"""List every name of transformers that this package uses, because an upgrade of transformers may break each of them."""

from __future__ import annotations

import logging
import pkgutil

import transformers

from kvframe.contract import PluginError

_log = logging.getLogger("kvframe")

VERSION = transformers.__version__
"""The installed version."""

TESTED = ("5.20", "5.21", "5.22", "5.23", "5.24")
"""The minor versions of transformers whose models were compared, oldest first; ``make compat`` compares them."""

NAMES = (
    "transformers:__version__",
    "transformers:AttentionInterface.register",
    "transformers:AttentionMaskInterface.register",
    "transformers:AutoConfig.for_model",
    "transformers:AutoConfig.from_pretrained",
    "transformers:AutoModel._model_mapping",
    "transformers:AutoModel.from_config",
    "transformers:AutoModel.from_pretrained",
    "transformers:AutoModelForCausalLM._model_mapping",
    "transformers:AutoModelForCausalLM.from_config",
    "transformers:AutoModelForCausalLM.from_pretrained",
    "transformers:AutoModelForMultimodalLM._model_mapping",
    "transformers:AutoModelForMultimodalLM.from_config",
    "transformers:AutoModelForMultimodalLM.from_pretrained",
    "transformers:AutoModelForSeq2SeqLM._model_mapping",
    "transformers:AutoModelForSpeechSeq2Seq._model_mapping",
    "transformers:AutoModelForTextEncoding.from_config",
    "transformers:AutoModelForTextEncoding.from_pretrained",
    "transformers:AutoTokenizer.from_pretrained",
    "transformers:CONFIG_MAPPING",
    "transformers:PreTrainedConfig._attn_implementation",
    "transformers:PreTrainedConfig._experts_implementation",
    "transformers:PreTrainedConfig.get_text_config",
    "transformers:PreTrainedConfig.sub_configs",
    "transformers:PreTrainedConfig.to_dict",
    "transformers:PreTrainedModel._can_set_experts_implementation",
    "transformers:PreTrainedModel._from_config",
    "transformers:PreTrainedModel._keys_to_ignore_on_load_unexpected",
    "transformers:PreTrainedModel.can_generate",
    "transformers:PreTrainedModel.config_class",
    "transformers:PreTrainedModel.from_pretrained",
    "transformers:PreTrainedModel.get_decoder",
    "transformers:PreTrainedModel.get_encoder",
    "transformers:PreTrainedModel.get_input_embeddings",
    "transformers:PreTrainedModel.get_output_embeddings",
    "transformers:PreTrainedModel.set_attn_implementation",
    "transformers:PreTrainedModel.set_experts_implementation",
    "transformers:PreTrainedModel.tp_plan",
    "transformers:PreTrainedTokenizerBase.apply_chat_template",
    "transformers:PreTrainedTokenizerBase.clean_up_tokenization",
    "transformers:PreTrainedTokenizerBase.convert_ids_to_tokens",
    "transformers:PreTrainedTokenizerBase.convert_tokens_to_string",
    "transformers:PreTrainedTokenizerBase.decode",
    "transformers:PreTrainedTokenizerBase.vocab_files_names",
    "transformers:PythonBackend._decode",
    "transformers:SentencePieceBackend._decode",
    "transformers:SiglipVisionConfig",
    "transformers:TokenizersBackend._decode",
    "transformers:TokenizersBackend.backend_tokenizer",
    "transformers.cache_utils:Cache.has_previous_state",
    "transformers.cache_utils:Cache.update_conv_state",
    "transformers.cache_utils:Cache.update_recurrent_state",
    "transformers.cache_utils:MtpCache",
    "transformers.distributed.configuration_utils:DistributedConfig",
    "transformers.masking_utils:create_recurrent_attention_mask",
    "transformers.modeling_layers:MtpModel._project_to_logits",
    "transformers.modeling_layers:MtpModel.forward_layer",
    "transformers.modeling_layers:MtpModel.from_pretrained",
    "transformers.modeling_outputs:BaseModelOutput",
    "transformers.models.auto.modeling_auto:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "transformers.models.auto.modeling_auto:MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "transformers.models.auto.modeling_auto:MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",
    "transformers.quantizers.auto:AutoHfQuantizer.from_config",
    "transformers.utils:SAFE_WEIGHTS_INDEX_NAME",
    "transformers.utils:SAFE_WEIGHTS_NAME",
    "transformers.utils:WEIGHTS_INDEX_NAME",
    "transformers.utils:WEIGHTS_NAME",
    "transformers.utils:is_timm_available",
    "transformers.utils:logging.disable_progress_bar",
    "transformers.utils:logging.enable_progress_bar",
    "transformers.utils:logging.get_verbosity",
    "transformers.utils:logging.is_progress_bar_enabled",
    "transformers.utils:logging.set_verbosity",
    "transformers.utils:logging.set_verbosity_error",
)
"""``module:attribute`` of classes, functions and methods that are called, read, replaced or imitated."""


def missing_names() -> list[str]:
    """Return the names that the installed transformers does not have."""
    missing = []
    for name in NAMES:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    return missing


def check_transformers() -> None:
    """Check the installed transformers before a module that uses it is imported; warn of a version that is untested.

    Raises:
        PluginError: It lacks a name.
    """
    if missing := missing_names():
        raise PluginError(
            f"transformers {VERSION} lacks {', '.join(missing)}, which kvframe-transformers uses; "
            f"install a version that is tested: {_TESTED_RANGE}"
        )
    if is_untested():
        _log.warning(
            "transformers %s is newer than the versions that kvframe-transformers is tested with (%s): every model is "
            "compared with its own forward before it serves, unless the stack sets self_check = false",
            VERSION,
            _TESTED_RANGE,
        )


def is_untested() -> bool:
    """Return whether the installed transformers is of a newer minor version than those that are tested."""
    return _minor_of(VERSION) > _minor_of(TESTED[-1])


def is_of_minor(minor: str) -> bool:
    """Return whether the installed transformers is of a minor version, such as ``5.20``."""
    return _minor_of(VERSION) == _minor_of(minor)


def if_untested() -> str:
    """Return what an error says more if it may be due to a version that is untested; otherwise an empty string."""
    if not is_untested():
        return ""
    return f"; the cause may be transformers {VERSION}, which is newer than the tested versions ({_TESTED_RANGE})"


def _minor_of(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


_TESTED_RANGE = f"{TESTED[0]} to {TESTED[-1]}"
