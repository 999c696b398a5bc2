"""Integrations with accelerate, transformers' Trainer, Lightning, DDP, FSDP and SyncBatchNorm.

accelerate, transformers and Lightning are imported only if they are used.
"""
