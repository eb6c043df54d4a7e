"""What knows earlier releases: the v0.1 protocol, AgentOps.

A client of the v0.1 protocol polls for tasks and posts results, a server hands tasks out and keeps results. The server
sits on a `LightningStore`: a task is a rollout, a claim is an attempt, a result is the spans and metadata of an
attempt. Old clients and new runners can therefore share one queue. Public paths elsewhere re-export what lives here.
"""
