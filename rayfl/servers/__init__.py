"""The servers: the driver (GPS), the local parameter servers (LPS), and what they write down."""
