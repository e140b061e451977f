"""``baton top``: the live page in a terminal. ``screen`` draws a snapshot, ``command`` follows the server."""
