"""An etcd that the job's launchers run: its certificates, its members, their processes."""
