"""Plans and manages memory in the stages of torch.distributed.pipelining schedules."""
