"""One session on a GPU: stages in processes of their own, a line on disk for every measurement, then a page.

    python -m benchmarks.gpu_session --seconds 540     # measure; the lines are in $OUT, or in build/gpu-session
    python -m benchmarks.gpu_session.page              # write benchmarks/results/gpu.md from those lines
    python -m benchmarks.gpu_session --device cpu      # a dry run at tiny sizes

Stages go from the cheapest proof to the dearest. A crash, a hang or a full device ends one stage. A session that is
killed loses at most the measurement that was under way (docs/gpu.md).
"""
