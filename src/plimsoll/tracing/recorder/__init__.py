"""Records ATen calls as ops that read and write versions of storages. Traces and recipes (ops that rebuild a value) are made
from this log.
"""
