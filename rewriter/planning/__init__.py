"""What goes where, and when: the Plan made, checked, advised on."""
