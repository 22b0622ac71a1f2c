"""Policies: models behind one protocol (`mempo.core.Policy`). Import the module of the one you need.

mempo.policy.local      a transformers model in this process (extra: train)
mempo.policy.openai     any OpenAI-compatible server
mempo.policy.scripted   fixed texts, for tests
"""
