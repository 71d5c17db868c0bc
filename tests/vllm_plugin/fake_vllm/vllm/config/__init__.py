from typing import Any

_current_vllm_config: Any = None


def get_current_vllm_config_or_none() -> Any:
    return _current_vllm_config
