"""Evidence about plans and models: verify, compare, probe, diagnose, explain, advise."""
