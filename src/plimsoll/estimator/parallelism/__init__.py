"""Spreads a traced step over ranks: pipeline stages, ZeRO shards, their buffers and collectives."""
