"""Transport by NIXL over UCX: RDMA between hosts. Optional."""
