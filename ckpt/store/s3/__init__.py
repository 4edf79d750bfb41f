"""The S3 store: credentials, calls with retries, and uploads in parts."""
