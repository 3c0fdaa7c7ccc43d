"""A traced step and a layout in, the trace of every rank out: stages of the pipeline, ZeRO, their buffers and collectives."""
