"""Everything that uses Ray: connection, driver actor, client and server actors, placement; also the inline
backend.
"""
