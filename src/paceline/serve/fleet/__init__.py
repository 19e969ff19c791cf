"""The local fleet: several engines behind one server, and answers that outlive them."""
