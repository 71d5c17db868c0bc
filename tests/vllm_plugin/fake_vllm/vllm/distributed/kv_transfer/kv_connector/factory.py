from typing import Any, ClassVar


class KVConnectorFactory:
    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls._registry[name] = (module_path, class_name)
