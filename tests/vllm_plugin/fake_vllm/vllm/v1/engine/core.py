from typing import Any


class EngineCore:
    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError
