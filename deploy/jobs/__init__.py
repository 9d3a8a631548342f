"""Batch work on a service: summaries of many documents, or any other question about each, by hand or as a Ray job."""
