"""Ray's room: the driver (GPS), local parameter servers, client actors, checkpoints; and the inline backend."""
