"""The conformance kit: suites that connectors and transports, ours and others, have to pass. Needs pytest."""
