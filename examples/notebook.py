from rljob import Client, JobFinishedError

client = Client()  # or Client(context="staging", namespace="team-a")
submission = client.submit(
    "job.yaml",
    name="small-lr",
    changes=["spec.training.optimizer.learningRate=1e-6", "spec.training.steps=200"],
)
name = submission.job.name

for job in client.watch(name):  # the job now and after every change; here until its first progress
    progress = job.status.progress
    if progress is not None:
        print(job.phase, progress.step, progress.total_steps, progress.reward_mean)
        break

print(*client.logs(name, tail=2), sep="\n")
try:
    job = client.wait(name, "Complete", timeout_seconds=24 * 3600)
    print(job.status.export_uri)
except JobFinishedError as error:
    print(error)  # RLJob team-a/small-lr has finished: Failed, OutOfMemory: ...
