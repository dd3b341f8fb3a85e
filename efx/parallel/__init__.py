"""Devices and processes: meshes, shardings, several hosts, signals, memory of this process."""
