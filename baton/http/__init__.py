"""HTTP layer of the engine server and the router: limits, deadlines, API keys, and checks of requests.
connections.py   limits and deadlines of connections (uvicorn has few of its own)
gate.py          API keys, Host, content type, header bytes: before the application sees a request
bodies.py        reads bodies within a deadline and a total budget, and checks their JSON
workers.py       worker processes for input whose cost has no bound: killed at their deadline
errors.py        answers other than 200, in OpenAI's form
"""
