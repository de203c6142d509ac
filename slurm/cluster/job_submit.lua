-- Partition strict: a job must say how long it takes.
function slurm_job_submit(job, partitions, uid)
    if job.partition == "strict" and job.time_limit == slurm.NO_VAL then
        slurm.log_user("partition strict needs a time limit: --time")
        return slurm.ESLURM_INVALID_TIME_LIMIT
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
    return slurm.SUCCESS
end
