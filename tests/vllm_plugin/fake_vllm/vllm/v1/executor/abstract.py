from typing import Any


class Executor:
    def add_lora(self, lora_request: Any) -> bool:
        return True
