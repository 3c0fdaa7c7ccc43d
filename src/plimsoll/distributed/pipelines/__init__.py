"""Plans and manages the stages of torch.distributed.pipelining schedules."""
