# Images that stand for the third-party ones of the compose file, of one image of Debian's packages (with_engine.sh).
# They have what the file and infra/Dockerfile use of those: programs, users, directories, entry points, signals.
FROM charonia-stand-in AS python
CMD ["python3"]

FROM charonia-stand-in AS redis
RUN install -d -o 999 -g 999 /data
VOLUME /data
WORKDIR /data

FROM charonia-stand-in AS haproxy
STOPSIGNAL SIGUSR1
USER haproxy

FROM charonia-stand-in AS prometheus
RUN install -d -o nobody -g nogroup /prometheus
USER nobody
VOLUME /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
