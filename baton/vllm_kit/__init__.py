"""Site of the conformance kit that hosts connectors as vLLM does. Needs vLLM."""
