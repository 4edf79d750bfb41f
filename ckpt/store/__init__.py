"""Stores: a local or shared file system, or S3, where checkpoints are kept."""
