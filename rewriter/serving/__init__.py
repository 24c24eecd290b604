"""How a service behaves under load, simulated: traffic, instances, queues, and the load that its objectives allow."""
