"""Calls of HTTP services that speak JSON: what the retriever's client and the policies of remote servers share."""

from mempo.net.service import CallError, Counters, JsonService, is_loopback, retry_after_seconds

__all__ = ["CallError", "Counters", "JsonService", "is_loopback", "retry_after_seconds"]
