"""The coordinator on etcd."""
