"""The v0.1 HTTP protocol, whole, in one room; `agentlightning.client` and `agentlightning.server` are its doors.

A client polls for tasks and posts results, a server hands tasks out and keeps results. The server sits on a
`LightningStore`: a task is a rollout, a claim is an attempt, a result is the spans and metadata of an attempt. Old
clients and new runners can therefore share one queue. Nothing outside this room and its doors imports it.
"""
