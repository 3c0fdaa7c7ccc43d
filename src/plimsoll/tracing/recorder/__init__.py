"""Records ATen calls as ops that read and write versions of storages. Traces and recipes are made from this log."""
