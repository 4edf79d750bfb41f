"""`holdfast doctor`: facts about machine, plan and job, judged one by one, each with a remedy."""
