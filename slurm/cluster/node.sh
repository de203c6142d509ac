#!/bin/bash
# A node of the test cluster: node.sh login|compute, as root and under docker --init. ./cluster starts it.
set -eu
here=$(dirname "$0")

# The user of the cluster is who owns the shared folder on the host; root's folder is given to the user.
if [ "$(stat -c %u /shared)" = 0 ]; then chown lab:lab /shared; fi
usermod --non-unique --uid "$(stat -c %u /shared)" lab
chown -R lab:lab /home/lab
chmod 666 /dev/fuse

# The login node makes the key of this cluster. It reaches the others by the shared /home, readable by root alone.
key=/home/.munge.key
if [ "$1" = login ] && [ ! -e $key ]; then (umask 077; head -c 128 /dev/urandom >$key.new; mv $key.new $key); fi
until [ -e $key ]; do sleep 0.1; done
install -o munge -g munge -m 400 $key /etc/munge/munge.key
install -d -o munge -g munge -m 755 /run/munge
install -d -o munge -g munge -m 700 /var/log/munge /var/lib/munge
runuser -u munge -- munged --num-threads=2

install -d /etc/slurm
cp "$here"/{slurm,gres}.conf "$here/job_submit.lua" /etc/slurm/
sed -i "s/^NodeName=c\[[^]]*\]/NodeName=c[1-$CLUSTER_NODES]/" /etc/slurm/slurm.conf
install -o slurm -g slurm -m 600 "$here/slurmdbd.conf" /etc/slurm/
for i in 0 1; do [ -e /dev/pretended-gpu$i ] || mknod -m 666 /dev/pretended-gpu$i c 1 3; done  # two more /dev/null

# Docker mounts this container's part of the cgroup tree read-only; Slurm is to make groups in it.
if [ -d /sys/fs/cgroup/freezer ] && mount -o remount,rw,bind /sys/fs/cgroup/freezer; then
    cgroups=cgroup/v1
elif [ -e /sys/fs/cgroup/cgroup.procs ] && mount -o remount,rw,bind /sys/fs/cgroup; then
    cgroups=cgroup/v2
else
    # Every signal for a job then reaches the helpers of Apptainer, too, and the job may lose its file system.
    cgroups=disabled
    sed -i 's,^ProctrackType=.*,ProctrackType=proctrack/linuxproc,' /etc/slurm/slurm.conf
fi
printf 'CgroupPlugin=%s\nIgnoreSystemd=yes\n' $cgroups >/etc/slurm/cgroup.conf

if [ "$1" = compute ]; then
    install -d /var/spool/slurmd
    exec slurmd -D
fi

# Whatever the cluster remembers is in /var/spool, which is in memory.
install -d -o slurm -g slurm /var/spool/{slurmctld,mariadb} /run/{mariadbd,slurm}
runuser -u slurm -- mariadb-install-db --no-defaults --skip-test-db --auth-root-authentication-method=socket \
    --auth-root-socket-user=slurm --datadir=/var/spool/mariadb >/dev/null
runuser -u slurm -- mariadbd --no-defaults --datadir=/var/spool/mariadb --skip-networking --log-warnings=0 \
    --innodb-flush-log-at-trx-commit=0 --innodb-doublewrite=0 --innodb-lock-wait-timeout=900 \
    --innodb-snapshot-isolation=OFF 2>/var/log/mariadb.log &
# slurmdbd would make the database itself, but its first connection, which fails for want of one, breaks the next.
until runuser -u slurm -- mariadb -e 'CREATE DATABASE IF NOT EXISTS slurm_acct_db' 2>/dev/null; do sleep 0.1; done
runuser -u slurm -- slurmdbd -D &
until sacctmgr --immediate --quiet add cluster intermodal 2>/dev/null; do sleep 0.2; done
sacctmgr --immediate --quiet add account research,teaching
sacctmgr --immediate --quiet add qos short set MaxWall=10
sacctmgr --immediate --quiet add qos single set MaxJobsPerUser=1
sacctmgr --immediate --quiet add user lab Account=research,teaching DefaultAccount=research QOS=normal,short,single
# A reservation to try --reservation with. It holds licences and no nodes, so that it stands in nobody's way.
{
    until scontrol ping | grep -q UP; do sleep 0.2; done
    scontrol create reservation ReservationName=course Users=lab StartTime=now Duration=365-0 Licenses=course:4 \
        Flags=ANY_NODES
} &
exec slurmctld -D
