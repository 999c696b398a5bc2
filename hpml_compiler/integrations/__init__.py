"""Libraries and wrappers around the training loop: accelerate, transformers' Trainer, Lightning, DDP, FSDP, SyncBatchNorm.

accelerate, transformers and Lightning are imported only if they are used.
"""
