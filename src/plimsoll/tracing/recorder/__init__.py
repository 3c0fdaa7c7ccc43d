"""Records ATen calls as ops over versions of storages: the log that traces and recipes are made from."""
