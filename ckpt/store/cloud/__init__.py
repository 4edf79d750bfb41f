"""Google Cloud Storage and Azure Blob Storage, by obstore."""
