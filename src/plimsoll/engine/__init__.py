"""Execute a plan on a model: saved-tensor hooks, replay of dropped tensors, guards, and the fallback that keeps everything."""
