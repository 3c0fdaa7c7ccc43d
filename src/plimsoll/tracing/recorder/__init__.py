"""Records ATen calls as ops over versions of storages: the log behind traces and recipes."""
