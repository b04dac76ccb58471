"""What `inferdbg demo` serves and asks: a museum's placards."""
