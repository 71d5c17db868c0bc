"""Sources of members beside the options and registrations: a file, DNS, Kubernetes, Redis."""
