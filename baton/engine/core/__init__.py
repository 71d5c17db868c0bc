"""Engine core: the step loop, the process around it, its messages and its client."""
