"""Names under which servers are published: on a shared disk, in etcd, on Ray."""
