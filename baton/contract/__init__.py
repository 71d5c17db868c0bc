"""What an engine and a KV connector say to each other: vLLM's `KVConnectorBase_V1`, made sound."""
